"""Layout arithmetic: which bundle belongs to whom."""

import pytest

from slime.config.arguments import Args
from slime.core.errors import ConfigError
from slime.ray.placement_group import Node, node_of_bundle, plan_layout


def flags(nodes=1, per_node=2, rollout=2, per_engine=1, colocate=False):
    values = {
        "actor_num_nodes": nodes,
        "actor_num_gpus_per_node": per_node,
        "rollout_num_gpus": rollout,
        "rollout_num_gpus_per_engine": per_engine,
        "colocate": colocate,
        "engine_models": [],
    }
    return Args(values, {})


def test_disaggregated_roles_share_no_bundle():
    layout = plan_layout(flags(nodes=2, per_node=2, rollout=4, per_engine=2))
    assert layout.trainer == [0, 1, 2, 3]
    assert layout.engines == [[4, 5], [6, 7]]
    assert layout.num_bundles == 8


def test_colocated_roles_share_every_bundle():
    layout = plan_layout(flags(per_node=4, rollout=4, per_engine=2, colocate=True))
    assert layout.trainer == [0, 1, 2, 3]
    assert layout.engines == [[0, 1], [2, 3]]
    assert layout.num_bundles == 4


@pytest.mark.parametrize("colocate", [False, True])
def test_a_role_that_is_left_out_takes_no_bundle(colocate):
    only_train = plan_layout(flags(colocate=colocate), with_engines=False)
    assert (only_train.engines, only_train.num_bundles) == ([], 2)
    only_rollout = plan_layout(flags(colocate=colocate), with_trainer=False)
    assert (only_rollout.trainer, only_rollout.num_bundles) == ([], 2)


def hosts(count):
    return [Node(id=f"id{i}", address=f"10.0.0.{i}") for i in range(count)]


def test_without_gpus_trainer_nodes_are_whole_and_engines_get_the_others():
    layout = plan_layout(flags(nodes=2, per_node=2, rollout=4, per_engine=2))
    placed = [node.address[-1] for node in node_of_bundle(layout, hosts(4))]
    assert placed == list("00112233")


def test_without_gpus_and_without_other_nodes_all_share():
    layout = plan_layout(flags(nodes=2, per_node=1, rollout=3))
    assert [node.address[-1] for node in node_of_bundle(layout, hosts(2))] == list("01010")


def test_too_few_nodes_are_refused():
    layout = plan_layout(flags(nodes=3, per_node=1, rollout=1))
    with pytest.raises(ConfigError, match="--actor-num-nodes 3: the Ray cluster has 2"):
        node_of_bundle(layout, hosts(2))

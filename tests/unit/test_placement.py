"""Layout arithmetic: which bundle belongs to whom."""

from types import SimpleNamespace

import pytest

from slime.ray.placement_group import plan_layout


def flags(nodes=1, per_node=2, rollout=2, per_engine=1, colocate=False):
    return SimpleNamespace(
        actor_num_nodes=nodes,
        actor_num_gpus_per_node=per_node,
        rollout_num_gpus=rollout,
        rollout_num_gpus_per_engine=per_engine,
        colocate=colocate,
    )


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

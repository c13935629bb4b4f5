"""A training script of a user, with an option of their own."""

import sys

from slime.utils.arguments import parse_args
from train import train


def add_custom_arguments(parser):
    parser.add_argument("--my-flag", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(train(parse_args(add_custom_arguments=add_custom_arguments)))

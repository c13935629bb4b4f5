"""Hooks that end the trainer's process in the middle of a step."""

import faulthandler
import os


def crash(*args: object, **kwargs: object) -> None:
    print("the loss was asked for")
    os.write(2, b"NCCL WARN something past Python\n")
    faulthandler._sigsegv()


def wrong_loss(args: object, batch: object, logits: object, sum_of_sample_mean: object) -> None:
    raise KeyError("my_column")  # the line that is told

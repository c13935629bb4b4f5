"""Hooks that end the trainer's process in the middle of a step."""

import faulthandler
import os


def crash(*args: object, **kwargs: object) -> None:
    print("the loss was asked for")
    os.write(2, b"NCCL WARN something past Python\n")
    faulthandler._sigsegv()

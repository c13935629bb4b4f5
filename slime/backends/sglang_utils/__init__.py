"""The command line of SGLang servers (command.py).

Server processes, the router and external servers are in slime/serving; weight transport and
checksums are in slime/weights/sglang_*.py.
"""

"""The command line of SGLang servers.

command.py    the argv of a server, on each node of a multi-node engine
installed.py  compares slime's option tables with the installed SGLang and router

Server processes, the router and external servers are in slime/serving; weight transport, layout and
checksums are in slime/weights/sglang_*.py.
"""

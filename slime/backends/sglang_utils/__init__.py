"""Everything that knows SGLang: its command line, its start, its router, its weight payloads.

command.py    the argv of a server, and of each node of an engine that spans several
process.py    a server process: its log file, its end
ports.py      free ports, also the blocks of them SGLang counts from one
readiness.py  waiting for a server: progress, deadline, its own last lines
flush.py      an idle server, before its memory is released
router.py     sglang-router in front of several engines
external.py   servers somebody else runs
payload.py    tensors as /update_weights_from_tensor takes them
layout.py     names and order of what a server holds, for its checksums
"""

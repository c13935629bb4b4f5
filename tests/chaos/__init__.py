"""Fault injection: break runs at random, resume them, and compare them with runs that nobody broke.

plan.py       seed ──▶ Schedule: mode, faults of each start, the moment of each
modes.py      mode ──▶ command line of train.py or train_async.py
hooks.py      in the run: reward, filter, ledger of groups, and signals of the phase reached
inject.py     waits for the moment, finds the processes and files, breaks them
leftovers.py  what a start left behind: processes, shared memory, temporary folders, ports
compare.py    the run that was broken and resumed against the undisturbed one
run.py        all of it for one seed after another; results.jsonl and a table
table.py      results.jsonl ──▶ the tables of docs/reliability.md

  make test-chaos SEEDS=0-39
"""

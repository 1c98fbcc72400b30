"""Pipeline parallelism: a schedule is a list of actions, proven before it runs, drawn before it is paid for.

split.py           which layers each stage holds
schedules.py       who holds which stage, and in what order every rank works
communication.py   the sends and receives merged into that order
simulate.py        proof (complete, no deadlock), bubble, peak memory
timeline.py        when everything happens, predicted or measured
engine.py          the one loop that runs any of these lists
"""

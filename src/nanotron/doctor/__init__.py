"""The ranks' machines before a run: devices, clocks, links, storage, and which of them is out of line.

measure.py    what a rank measures, some of it together with others
judge.py      what all ranks measured, as a table, and the outliers by name
examine.py    both, for the ranks of a run      (nanotron doctor, --preflight)
"""

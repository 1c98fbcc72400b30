"""Attacks on runs, each drawn from a seed and bounded in time: what is left must go on, and end like a run in peace.

kills.py      a rank of several dies in every phase of a step, a save and a load         (in the pool's workers)
launches.py   a rank is stopped or killed, or its launcher killed or told to stop        (nanotron train, torchrun)
flips.py      a bit of a checkpoint changes between two starts
disks.py      the disk is full at some byte
links.py      the link between two machines goes down                                    (two network namespaces; root)
trapped.py    a launch in which something happens at a chosen place

`python -m tests.torture` goes round them until its time is over; what every change runs has one small round of each.
"""

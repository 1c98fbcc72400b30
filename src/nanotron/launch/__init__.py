"""From a command line to ranks that train, and back to an exit code that says what happened.

run.py        one rank: checked config, threads, device, process groups, the trainer, a clean end   (run_train.py)
place.py      who this process is among its peers, and what it runs on
peers.py      the stores through which ranks agree, and their process group
watch.py      what a rank does that is told to stop, or whose launcher or peers are gone
failures.py   which rank failed first, on disk; roll.py: and through the store
folder.py     the run directory and the files that describe the run
host.py       all ranks of one machine, started and watched by one parent                           (nanotron train)
slurm.py      the batch script of a Slurm job                                                       (nanotron slurm)
signals.py    signals to stop, heard by the parent before there are ranks
streams.py    standard output and error, whatever becomes of them
display.py    the live display, drawn from metrics.jsonl                                            (nanotron watch)
"""

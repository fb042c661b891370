"""Files that start a plan elsewhere: torchrun scripts, a Slurm job, a Kubernetes JobSet.

A plan says which chip does what; `Facts` say how the machines around those chips are reached and
what they run (images, devices, partitions, volumes). `Job` brings both together, and one module
per target turns it into text. Nothing here imports torch or talks to a scheduler.
"""

from tutti.launch.facts import Facts
from tutti.launch.identity import rank_of_process
from tutti.launch.job import Job

__all__ = ["Facts", "Job", "rank_of_process"]

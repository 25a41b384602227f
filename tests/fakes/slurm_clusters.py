"""Clusters of SLURM whose controllers are folders: a script in the place of SLURM's programs asks them as these do."""

from pathlib import Path
from typing import Final

PROGRAM: Final = """#!/bin/sh
program=${0##*/} cluster=@local@ number=
for word; do
    case $word in
        --clusters=*) cluster=${word#*=};;
        --jobs=*) number=${word#*=};;
        [0-9]*) number=$word;;
    esac
done
cd "@folder@/$cluster" 2> /dev/null || {
    echo "$program: error: No cluster '$cluster' known by database." >&2
    echo "$program: error: '$cluster' can't be reached now.  Use 'sacctmgr list clusters'" >&2
    exit 1
}
case "$program $*" in
    scontrol*config) echo "ClusterName             = $cluster";;
    scontrol*show*job*)
        cat "$number.job" 2> /dev/null || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; };;
    scontrol*show*) cat "@records@/$2s.txt";;
    squeue*--me*) ;;
    squeue*) case $* in *--clusters=*) echo "CLUSTER: $cluster";; esac; cat queue;;
    sacct*SubmitLine*) cat "$number.line" 2> /dev/null;;
    sacct*) cat accounts;;
    scancel*) echo "$number" >> cancelled; : > queue;;
    sbatch*) cat sbatch;;
esac
"""
RECORDS: Final = Path(__file__).parents[1] / "fixtures" / "slurm"


class Clusters:
    """Clusters, as a machine of the first one sees them: those that it can ask, and which job has which number there.

    Args:
        folder: Where everything lies.
        local: The machine's own cluster.
        reachable: The clusters that it can ask with --clusters.
    """

    def __init__(self, folder: Path, local: str, *reachable: str) -> None:
        self._folder = folder / "clusters"
        self.bin = folder / "bin"
        self.bin.mkdir(exist_ok=True)
        for name in (local, *reachable):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
            for file in ("queue", "accounts", "cancelled"):
                (self._folder / name / file).touch()
            (self._folder / name / "sbatch").write_text("Submitted batch job 12\n")
        text = PROGRAM.replace("@local@", local).replace("@folder@", str(self._folder))
        for program in ("scontrol", "squeue", "sacct", "scancel", "sbatch", "srun"):
            path = self.bin / program
            path.write_text(text.replace("@records@", str(RECORDS)))
            path.chmod(0o755)

    def queue(self, cluster: str, number: str, state: str, *, name: str, log: Path) -> None:
        """Has a cluster's controller know one job, which writes a log."""
        nodes = "n7" if state == "RUNNING" else ""
        self.write(cluster, "queue", f"{number}|{state}|None|{nodes}|N/A|1:00:00|{name}\n")
        self.write(cluster, f"{number}.job", f"JobId={number} JobName={name} Command=x StdOut={log} Power=\n")

    def write(self, cluster: str, name: str, text: str) -> None:
        """Changes a file of a cluster: queue, accounts, sbatch (its answer), NUMBER.line (that submitted the job)."""
        (self._folder / cluster / name).write_text(text)

    def cancelled(self, cluster: str) -> list[str]:
        """The jobs that a cluster was asked to cancel."""
        return (self._folder / cluster / "cancelled").read_text().split()

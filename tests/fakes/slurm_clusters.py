"""Clusters of SLURM whose controllers are folders: a script in the place of SLURM's programs asks them as these do."""

from pathlib import Path
from typing import Final

PROGRAM: Final = """#!/bin/sh
program=${0##*/} cluster=@local@ number=
for word; do
    case $word in
        --clusters=*) cluster=${word#*=} cluster=${cluster%%,*};;
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
    scontrol*show*partition*) cat partitions 2> /dev/null || cat "@records@/partitions.txt";;
    scontrol*show*node*) cat nodes 2> /dev/null || cat "@records@/nodes.txt";;
    scontrol*show*) cat "@records@/$2s.txt";;
    squeue*--me*) case $* in *--clusters=*) echo "CLUSTER: $cluster";; esac; cat mine 2> /dev/null;;
    squeue*) case $* in *--clusters=*) echo "CLUSTER: $cluster";; esac; cat queue;;
    sacctmgr*clusters*) ls "@folder@";;
    sacctmgr*) ;;
    sacct*SubmitLine*) cat "$number.line" 2> /dev/null;;
    sacct*) cat accounts;;
    scancel*) echo "$number" >> cancelled; : > queue;;
    sbatch*) cat sbatch;;
esac
"""
ONE_NODE: Final = r"""#!/bin/sh
here=@folder@
program=${0##*/}
alive() { kill -0 "$(cat $here/$1.pid)" 2> /dev/null; }
case "$program $*" in
    sbatch*--help*|srun*--help*) exit 1;;
    sbatch*)
        number=$(($(ls $here/*.job 2> /dev/null | wc -l) + 41))
        for script; do :; done
        cp "$script" $here/$number.job
        log=$(sed -n "s/^#SBATCH --output=//p" "$script" | sed "s/%j/$number/")
        SLURM_JOB_ID=$number SLURM_CLUSTER_NAME=alpha SLURM_JOB_NODELIST=n1 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=1 \
            SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_PARTITION=main \
            setsid bash "$script" >> "$log" 2>&1 < /dev/null &
        echo $! > $here/$number.pid
        echo "Submitted batch job $number";;
    srun*)
        while :; do case $1 in --output) log=$2; shift 2;; -*) shift;; *) break;; esac; done
        exec "$@" >> "$(echo "$log" | sed "s/%j/$SLURM_JOB_ID/; s/%t/0/")" 2>&1;;
    scancel*)
        for number; do kill -TERM $(ps -o pid= --ppid "$(cat $here/$number.pid)"); done;;
    squeue*)
        for job in $here/*.job; do
            number=$(basename $job .job)
            name=$(sed -n "s/^#SBATCH --job-name=//p" $job)
            alive $number && echo "$number|RUNNING|None|n1|N/A|1:00:00|$name"
        done; exit 0;;
    sacct*) exit 0;;
    scontrol*show*job*)
        for number; do :; done
        log=$(sed -n "s/^#SBATCH --output=//p" $here/$number.job | sed "s/%j/$number/")
        echo "JobId=$number JobName=x StdOut=$log Requeue=1 Restarts=0";;
    scontrol*) cat "@records@/$2s.txt";;
esac
"""
"""SLURM's programs of a cluster that starts each job at once, as a process of this machine."""

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
        for program in ("scontrol", "squeue", "sacct", "scancel", "sbatch", "srun", "sacctmgr"):
            path = self.bin / program
            path.write_text(text.replace("@records@", str(RECORDS)))
            path.chmod(0o755)

    def queue(self, cluster: str, number: str, state: str, *, name: str, log: Path) -> None:
        """Has a cluster's controller know one job, which writes a log."""
        nodes = "n7" if state == "RUNNING" else ""
        self.write(cluster, "queue", f"{number}|{state}|None|{nodes}|N/A|1:00:00|{name}\n")
        self.write(cluster, f"{number}.job", f"JobId={number} JobName={name} Command=x StdOut={log} Power=\n")

    def write(self, cluster: str, name: str, text: str) -> None:
        """Changes a file of a cluster: queue, mine (a person's jobs), accounts, partitions, nodes, sbatch (its
        answer), NUMBER.line (that submitted the job).
        """
        (self._folder / cluster / name).write_text(text)

    def cancelled(self, cluster: str) -> list[str]:
        """The jobs that a cluster was asked to cancel."""
        return (self._folder / cluster / "cancelled").read_text().split()


def one_node(folder: Path) -> Path:
    """Makes the programs of a cluster that runs its jobs; returns their folder."""
    jobs, programs = folder / "jobs", folder / "programs"
    jobs.mkdir()
    programs.mkdir()
    for name in ("sbatch", "srun", "scancel", "squeue", "sacct", "scontrol"):
        path = programs / name
        path.write_text(ONE_NODE.replace("@folder@", str(jobs)).replace("@records@", str(RECORDS)))
        path.chmod(0o755)
    return programs

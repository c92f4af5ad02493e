#!/bin/bash
#SBATCH --account=project
#SBATCH --gpus-per-node=8
#SBATCH --job-name=qwen3
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/lustre/runs/qwen3/launch/jobs/qwen3_dry-run/sbatch-%j.out
#SBATCH --partition=batch
#SBATCH --requeue
#SBATCH --signal=USR1@300
#SBATCH --time=04:00:00

folder=/lustre/runs/qwen3/launch/jobs/qwen3_dry-run
log="$folder/agents-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.out"

# The agents write the result of an attempt to this folder.
attempt=${SLURM_RESTART_COUNT:-0}
notes=/lustre/runs/qwen3/launch/$SLURM_JOB_ID.$attempt
end() {
    status=$?
    trap - EXIT
    mkdir -p "$notes"
    if [ -r "$notes/done" ]; then
        read -r status < "$notes/done"
    elif [ "$status" -gt 133 ] && [ "$status" -lt 140 ]; then
        # All agents were killed, as by SIGKILL, and their roles ended with them.
        echo "the agents were killed: srun ended with status $status" > "$notes/first_error.txt"
        tail -qn 5 "$folder"/*"$SLURM_JOB_ID"*.out >> "$notes/first_error.txt" 2> /dev/null
        cd /lustre/runs/qwen3/launch && ls -d ../checkpoints/step_* ../warm_start/checkpoints/step_* > "$notes/killed" 2> /dev/null
        same=0
        for earlier in "$SLURM_JOB_ID".*/killed; do
            cmp -s "$earlier" "$notes/killed" && same=$((same + 1))
        done
        if [ "$same" -lt 3 ]; then status=85; fi
    fi
    case $status in
        0) ;;
        85)
            if [ "$attempt" -ge 3 ]; then
                echo "launch: max_restarts = 3 attempts are used up; submit the run again" >&2
            elif scontrol -o show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING '; then
                echo "launch: attempt $attempt ended; the job is queued again from its last checkpoint" >&2
                scontrol requeue "$SLURM_JOB_ID"
            fi ;;
        130)
            scancel "$SLURM_JOB_ID" ;;  # Slurm's state is then CANCELLED, not FAILED
        *)
            case $status in '' | *[!0-9]*) status=1 ;; esac
            if [ ! -e "$notes/first_error.txt" ]; then
                # No agent wrote an error: use the output of srun and the container.
                tail -qn 40 "$folder"/*"$SLURM_JOB_ID"*.out > "$notes/first_error.txt" 2> /dev/null
                [ -s "$notes/first_error.txt" ] ||
                    echo "no log is left in $folder: was the run's folder moved or removed?" > "$notes/first_error.txt"
            fi ;;
    esac
    exit "$status"
}
trap end EXIT
if [ "$attempt" -gt 3 ]; then
    echo "launch: attempt $attempt is not started: max_restarts = 3" >&2
    exit 1
fi

# Order nodes by switch, so that neighbours in the job (pipeline stages) are neighbours in the network.
mkdir -p "$notes"
scontrol show hostnames "$SLURM_JOB_NODELIST" > "$notes/nodes"
scontrol show topology 2> /dev/null | sed -nE '/Level=0 |^BlockName=/s/.* Nodes=([^ ]*).*/\1/p' |
    xargs -r -n 1 scontrol show hostnames | grep -Fxf "$notes/nodes" | awk '!seen[$0]++' > "$notes/order"
if [ -s "$notes/order" ] && [ "$(wc -l < "$notes/order")" = "$(wc -l < "$notes/nodes")" ]; then
    export SLURM_HOSTFILE="$notes/order" SLURM_DISTRIBUTION=arbitrary
fi

srun --output="$log" '--container-image=/lustre/my images/fp8.sqsh' '--container-mounts=/lustre/models:/models:ro,/a b:/c d,/lustre/runs:/lustre/runs' --container-workdir="$folder/code" --cpu-bind=none --kill-on-bad-exit=0 --wait=420 python -m launch.agent "$folder/job.json"

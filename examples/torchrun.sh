#!/bin/bash
# Start the ranks of a script with torchrun, on one or several machines:
#
#     bash examples/torchrun.sh                # minimal.py on two ranks
#     NODES=2 RANKS=8 HEAD=host-a bash torchrun.sh train.py --lr 0.1
#
# Run the second line on host-a and on host-b. The script's Trainer needs
# devices=8 and num_nodes=2.
set -euo pipefail

if [ $# = 0 ]; then
    set -- "$(dirname "$0")/minimal.py"
fi

# With port 0, torchrun chooses a free port on one machine.
endpoint=localhost:0
if [ -n "${HEAD:-}" ]; then
    endpoint=$HEAD:29400
fi

# After a failure, torchrun restarts all ranks, at most three times, and
# Trainer.fit(ckpt_path="last") resumes from the newest checkpoint.
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "${RANKS:-2}" \
    --max-restarts 3 --rdzv-backend c10d --rdzv-id "${JOB:-train}" \
    --rdzv-endpoint "$endpoint" "$@"

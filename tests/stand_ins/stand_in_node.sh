#!/bin/sh
# Stands in for the node environment's Python where a test wants a machine but not its work.
echo "attempt $GRPO_ORCH_ATTEMPT"
if [ -n "$STAND_IN_REASON" ]; then echo "$STAND_IN_REASON" > "$GRPO_ORCH_WORKDIR/exit_reason"; fi
if [ -n "$STAND_IN_EXIT" ]; then exit "$STAND_IN_EXIT"; fi
sleep 600 &
exec sleep 600

# SkyPilot runs this in a pod that Kubernetes is about to end (event `preemption`). It sends SIGTERM to the machine's
# work and waits for its end. Kubernetes signals only process 1 of a pod, which is SkyPilot's and ignores it.
#
# A line prepended to this file sets NODE.
# shellcheck shell=sh disable=SC2154
for record in "$HOME"/.grpo-orch/work/*/"$NODE"/machine.json; do
    pid=$(sed -n 's/.*"pid": *\([1-9][0-9]*\).*/\1/p' "$record" 2>/dev/null)
    # The pid may belong to another process if the home outlives the pod.
    if [ -n "$pid" ] && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q cloud_machine; then
        echo "grpo-orch notice: sending SIGTERM to process $pid"
        kill -TERM "$pid"
        while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
    fi
done

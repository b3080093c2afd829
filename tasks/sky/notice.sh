# What SkyPilot runs in a pod that Kubernetes is about to end (its event `preemption`): the machine's work is told, and
# waited for. Kubernetes tells process 1 of a pod alone, which is SkyPilot's and deaf to it.
#
# Told by its first line, which is put before this file: NODE.
# shellcheck shell=sh disable=SC2154
for record in "$HOME"/.grpo-orch/work/*/"$NODE"/machine.json; do
    pid=$(sed -n 's/.*"pid": *\([1-9][0-9]*\).*/\1/p' "$record" 2>/dev/null)
    # It may be another's by now, where the home outlives the pod.
    if [ -n "$pid" ] && tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q cloud_machine; then
        echo "grpo-orch notice: to process $pid"
        kill -TERM "$pid"
        while kill -0 "$pid" 2>/dev/null; do sleep 0.2; done
    fi
done

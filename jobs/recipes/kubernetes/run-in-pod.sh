#!/usr/bin/env bash
# run-in-pod.sh COMMAND...: the first process of a pod. It hands SIGTERM on to COMMAND, and makes exit
# code 3 (done, some rows carry errors) a success, for which a podFailurePolicy has no action.
set -uo pipefail

runner=
signalled=
handed_on=
woken=1

hand_on() {
    if [[ -n $runner && -z $handed_on ]]; then
        handed_on=1
        kill -TERM "$runner"
    fi
}
trap 'woken=1 signalled=1; hand_on' TERM

"$@" &
runner=$!
# It may have come before the line above.
if [[ -n $signalled ]]; then hand_on; fi
# `wait` returns early when a trap ran.
while [[ -n $woken ]]; do
    woken=
    wait "$runner"
    code=$?
done
# Killed before it listened to signals, it had done nothing.
if [[ -n $signalled ]] && ((code > 128)); then code=75; fi

if ((code == 3)); then
    echo "done, but some rows carry errors" >&2
    code=0
fi
exit "$code"

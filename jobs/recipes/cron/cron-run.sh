#!/usr/bin/env bash
# cron-run.sh LOG COMMAND...: runs COMMAND with its stderr appended to LOG, and prints only what
# somebody should read, since cron mails whatever a job prints.
set -uo pipefail

log=$1
shift
mkdir -p "$(dirname "$log")"
echo "== $(date --iso-8601=seconds) $*" >>"$log"
code=0
summary=$("$@" 2>>"$log" | tail -n 1) || code=$?
echo "$summary" >>"$log"

case $code in
0 | 75) ;; # done; or interrupted, or still running: the next call goes on
3) echo "done, but some rows carry errors: $summary" ;;
*)
    echo "exit code $code: $summary"
    echo "the end of $log:"
    tail -n 20 "$log"
    ;;
esac
exit "$code"

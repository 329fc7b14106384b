"""Offline batch inference with a speculative decoder whose drafter learns while the job runs."""

"""Failure detection among the ranks of a pipe: heartbeats, watchdog, report, abort."""

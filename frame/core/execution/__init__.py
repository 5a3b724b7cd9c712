"""Execution: runs scheduled batches on a rank's device."""

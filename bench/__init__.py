"""Load, trace replay, comparison and reports. Reaches a router over HTTP alone."""

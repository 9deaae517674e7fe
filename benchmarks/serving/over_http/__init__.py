"""What http_overhead.py measures with: a client that takes little time, an engine that computes nothing."""

"""The study of what a conversion keeps (`benchmarks.study`): its arms, their work, records and report."""

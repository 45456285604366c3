"""Command lines: `spark-run`, `spark-run doctor`, `spark-replicas`, and the process of a rank."""

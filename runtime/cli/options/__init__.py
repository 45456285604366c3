"""The options of `spark-run` as a table, and their configuration file and completion."""

"""The build half of the `native` executor: packed weights, tactics, cubins, launch records."""

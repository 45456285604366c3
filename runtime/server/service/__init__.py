"""From a body to a running request: admission, deadlines, generation and stored responses."""

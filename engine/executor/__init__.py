"""Where a step plan is computed: in process, in rank processes, or nowhere at all (fake)."""

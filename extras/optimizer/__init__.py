"""Which configuration of a model is best, and how many replicas keep an objective: `charonia analyze`, `calibrate` and
`simulate`. The first two start servers and measure; a simulation runs the real scheduler in simulated time."""

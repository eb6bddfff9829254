"""The measuring stick: throughput and step-time benchmarks, run as `python -m charonia.bench.NAME`."""

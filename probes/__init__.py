"""Linear probes over activations: batched solvers, grouped splits, controls, sweeps."""

"""Linear probes over activations: batched solvers, grouped splits, controls, sweeps."""

from microtome.probes.groups import merged_groups as merged_groups
from microtome.probes.logistic import LogisticProbe as LogisticProbe
from microtome.probes.logistic_fits import LogisticFits as LogisticFits
from microtome.probes.logistic_solver import fit_logistic as fit_logistic
from microtome.probes.sweep import sweep as sweep
from microtome.probes.sweep_result import Sweep as Sweep

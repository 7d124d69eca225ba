"""How many engines a workload needs, by the paper's inequalities and then by simulation."""

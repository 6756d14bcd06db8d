"""The engines of clusters, as launchers: SLURM, Ray, Kubernetes."""

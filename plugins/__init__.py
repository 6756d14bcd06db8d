"""The plug-ins of this repository: a folder, and a distribution, each."""

"""What the frameworks' own code makes of an exported text, each in a process of its own.

A framework wants other versions of everything than its neighbour, and importing it whole takes two
dozen packages that have nothing to do with a mesh. So a process reads with that part of the
installed framework which reads its mesh, remat and batch: MaxText's configuration as it is, of the
others single files or single functions of them, compiled from the installed source.

    pip install --no-deps maxtext==0.2.5 jinja2 markupsafe omegaconf antlr4-python3-runtime \
        pathwaysutils requests urllib3 idna certifi charset-normalizer
    pip install --no-deps --pre marin-levanter==0.2.227.dev40316220070 draccus mergedeep \
        pyyaml-include typing_inspect mypy_extensions toml
    pip install --no-deps easydel==0.3.0 eformer==0.0.101 contextlib2
    pip install --no-deps google-tunix==0.1.7 omegaconf antlr4-python3-runtime
    pip install --no-deps attrs  # and checkouts of AXLearn and of Loadax's `src` on PYTHONPATH

The package index has an AXLearn of 2024 and a Loadax of before its meshes, which do not count.
"""

"""Collects the content of a study's HTML report from the study, without compiling or running
anything."""

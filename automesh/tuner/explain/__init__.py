"""Why a mesh takes its time, from what a study keeps."""

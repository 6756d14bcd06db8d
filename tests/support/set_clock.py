"""A time of day that a test sets while other processes run, as an administrator sets a host's.

The processes load a small library before all others. It adds to the time of day, and to nothing
else, the seconds that stand in a file; the file is mapped, so they see a change at once.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import psutil

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *set_s;

__attribute__((constructor)) static void map_it(void) {
  const char *path = getenv("TEST_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) abort();
  void *found = mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
  if (found == MAP_FAILED) abort();
  close(file);
  set_s = found;
}

int clock_gettime(clockid_t id, struct timespec *out) {
  int failed = syscall(SYS_clock_gettime, id, out);
  if (!failed && set_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
    out->tv_sec += *set_s;
  return failed;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}
"""

HAS_COMPILER = shutil.which("cc") is not None


class SetClock:
    """The time of day of those who run with its `variables`.

    Attributes:
      variables: of the environment of a process.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._library = folder / "set_s", folder / "set_clock.so"
        source = folder / "set_clock.c"
        source.write_text(_SOURCE)
        subprocess.run(
            ["cc", "-O1", "-shared", "-fPIC", "-o", str(self._library), str(source)],
            check=True,
            capture_output=True,
        )
        self.set(0)
        self.variables = {
            **os.environ,
            "LD_PRELOAD": str(self._library),
            "TEST_CLOCK": str(self._file),
        }

    def set(self, seconds: int) -> None:
        """Moves the time of day to so many seconds after the true one."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("=q", seconds))

    def is_seen_by(self, process: psutil.Process) -> bool:
        """Whether a process has this clock."""
        return any(one.path == str(self._library) for one in process.memory_maps())

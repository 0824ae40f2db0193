"""Scripts started by MindSpore's ``msrun``, or in a forked process that has already imported MindFormers."""

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]

# Fork all training processes from a server process that has imported MindFormers once. Otherwise each short training
# would spend half of its time on this import.
_forked = multiprocessing.get_context("forkserver")
_forked.set_forkserver_preload(["tests.shared.imported_once"])


class Killable:
    """A process that can be killed together with all processes that it has started."""

    def kill_all(self):
        """Kill the process and its descendants with SIGKILL, so that they cannot clean up."""
        if self.poll() is None:
            # Killing the process group is not enough, because msrun gives each worker its own group.
            leader = psutil.Process(self.pid)
            for process in [*leader.children(recursive=True), leader]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.wait()


class StartedRun(Killable, subprocess.Popen):
    """Runs a command as a separate process, which leads a new process session (setsid)."""

    def __init__(self, command, cwd, environment, output):
        with open(output, "w") as file:
            super().__init__(
                command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )


class ForkedRun(Killable):
    """Runs a Python script in a separate process, which starts with MindFormers already imported.

    The process leads a new process session (setsid). The class has the methods of ``subprocess.Popen`` that tests use.
    """

    def __init__(self, command, cwd, environment, output, errors=None):
        _ensure_server()
        self._script_succeeded = _forked.Event()
        arguments = self._script_succeeded, command, str(cwd), environment, str(output), str(errors or output)
        self._process = _forked.Process(target=_run_script, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        """Return the exit code (negative for a signal), or None while the process runs.

        Of processes that train together, about 1 in 60 crashes in MindSpore's exit handlers, after the script has
        succeeded and the process has left the cluster. Such a crash counts as success.
        """
        exit_code = self._process.exitcode
        return 0 if exit_code == -signal.SIGSEGV and self._script_succeeded.is_set() else exit_code

    def wait(self, timeout=None):
        """Wait for the process and return its exit code; raise TimeoutExpired if ``timeout`` seconds are not enough."""
        self._process.join(timeout)
        if (exit_code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return exit_code


def _ensure_server():
    # The fork server finds the modules to preload only in the folders of its environment variable PYTHONPATH.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        # A forked process copies each page that it writes to, so huge pages would cost time there. scripts/test.sh sets
        # the options for huge pages last.
        patch.setenv("MALLOC_CONF", os.environ.get("MALLOC_CONF", "").partition(",metadata_thp")[0])
        forkserver.ensure_running()


def _run_script(succeeded, command, cwd, environment, *files):
    # Exclude the modules that are already loaded from all later garbage collections.
    gc.freeze()
    os.setsid()
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
        succeeded.set()
    except SystemExit as end:
        if not end.code:
            succeeded.set()
        raise
    finally:
        # A forked process does not run its exit handlers by itself when it ends. As at the end of Python, an exception
        # in a handler is printed and does not change the exit code.
        try:
            atexit._run_exitfuncs()
        except Exception:
            traceback.print_exc()


class ForkedCluster:
    """A script in several processes that train together, as ``msrun`` would start them; used like :class:`ForkedRun`.

    The processes find each other through a scheduler process, which is killed when all of them have ended.
    """

    def __init__(self, processes, command, cwd, environment, outputs):
        shared = {"MS_WORKER_NUM": str(processes), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(free_port())}
        environment = {**environment, **shared}
        as_scheduler = {**environment, "MS_ROLE": "MS_SCHED"}
        script = str(Path(__file__).with_name("imported_once.py"))
        self._scheduler = ForkedRun([script], cwd, as_scheduler, outputs[0].with_name("scheduler.log"))
        self._workers = []
        for rank, output in enumerate(outputs):
            of_worker = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank), "RANK_ID": str(rank)}
            self._workers.append(ForkedRun(command, cwd, environment | of_worker, output))

    def poll(self):
        """Return the exit code of a process that has ended, or None while all processes run."""
        return next((code for worker in self._workers if (code := worker.poll()) is not None), None)

    def wait(self, timeout=None):
        """Wait for all processes; return 0 if all have succeeded, otherwise the exit code of a failed process."""
        self.exit_codes = [worker.wait(timeout) for worker in self._workers]
        self._scheduler.kill_all()
        return next((code for code in self.exit_codes if code != 0), 0)

    def kill_all(self):
        """Kill all processes and the scheduler with SIGKILL."""
        for process in (*self._workers, self._scheduler):
            process.kill_all()


def run_in_processes(processes, folder, script, *arguments):
    """Run a script in ``processes`` processes that train together, with their logs in ``folder``."""
    logs = [folder / f"worker_{rank}.log" for rank in range(processes)]
    cluster = ForkedCluster(processes, list(map(str, [script, *arguments])), folder, dict(os.environ), logs)
    try:
        exit_code = cluster.wait(300)
    finally:
        cluster.kill_all()
    assert exit_code == 0, "".join(log.read_text()[-3000:] for log in logs)


def with_this_python():
    """Return environment variables that put this Python first on the PATH, where ``msrun`` looks for ``python``."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def free_port():
    """Return the number of a free network port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]

"""Workers of the tests share the cores, with the processes that tests start too."""

import os


def test_processes_have_the_cores_of_their_worker(run_python):
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = int(run_python("import torch; print(torch.get_num_threads())"))
    assert threads == max(1, (os.cpu_count() or 1) // workers)

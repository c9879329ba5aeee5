"""The calibration kernels of a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import pytest
import torch

from headway.engines import calibration


def test_the_kernels_of_a_gpu_do_their_work(monkeypatch):
    monkeypatch.setattr(calibration, "CUDA_ORDER", 64)
    monkeypatch.setattr(calibration, "MIN_COPY_BYTES", calibration.MIB)
    waits = []
    kernels = calibration.torch_kernels(torch, "cpu", 0, lambda: waits.append(1))
    assert {kernel.name for kernel in kernels} == {"matmul", "copy", "launch", "python"}
    reading = calibration.read(kernels)
    assert set(reading) == {kernel.name for kernel in kernels}
    assert all(seconds > 0 for seconds in reading.values())
    # Every kernel but the Python loop waits for the GPU before it is done.
    assert len(waits) == 3 * (1 + calibration.ROUNDS)


def test_the_matrices_lie_in_the_copied_memory(monkeypatch):
    made = []

    class Counted:
        float32 = torch.float32
        mm = staticmethod(torch.mm)

        @staticmethod
        def randn(*size, **options):
            made.append(torch.randn(*size, **options))
            return made[-1]

        @staticmethod
        def zeros(*size, **options):
            made.append(torch.zeros(*size, **options))
            return made[-1]

        @staticmethod
        def zeros_like(tensor):
            made.append(torch.zeros_like(tensor))
            return made[-1]

    monkeypatch.setattr(calibration, "CUDA_ORDER", 64)
    monkeypatch.setattr(calibration, "MIN_COPY_BYTES", calibration.MIB)
    kernels = {k.name: k for k in calibration.torch_kernels(Counted, "cpu", 0, lambda: None)}
    source, target, small = made
    assert source.numel() * 4 == target.numel() * 4 == calibration.MIB
    kernels["copy"].work()
    assert torch.equal(source, target)
    kernels["matmul"].work()
    left, right = source[:4096].view(64, 64), source[4096:8192].view(64, 64)
    assert torch.allclose(target[:4096].view(64, 64), left @ right, atol=1e-4)
    kernels["launch"].work()
    assert small.tolist() == [float(calibration.CUDA_LAUNCHES)] * calibration.SMALL


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(calibration.UnavailableError, match="find no GPU for device cuda"):
        calibration.open_kernels("cuda")

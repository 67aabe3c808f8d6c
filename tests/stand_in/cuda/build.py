"""Build the stand-in CUDA libraries for the torch of this Python: `python build.py FOLDER`.

Needs gcc, g++ and CUDA's headers (the wheels nvidia-cuda-runtime and nvidia-cuda-crt). Functions
that torch asks for and no source here has are generated: they refuse, and the log names them.
A standin_cuda.pth loads the libraries in every process, GPUs are where STANDIN_CUDA_DEVICES is set.
"""

import re
import sys
import sysconfig
from importlib.metadata import requires
from pathlib import Path
from subprocess import check_call, check_output

HERE = Path(__file__).resolve().parent
SITE = Path(sysconfig.get_paths()["purelib"])
TORCH = SITE / "torch"
INCLUDES = [f"-I{HERE}", *(f"-isystem{p}" for p in SITE.glob("nvidia/cu*/include"))]
PREFIXES = {  # of a library's functions, where it is not the library's name
    "libcudart": "(__)?cuda", "libcuda": "cu[A-Z]", "libcublas": "cublas(?!Lt)",
    "libcusparse": "cusparse(?!Lt)", "libcufile": "cuFile", "libnccl": "p?nccl",
    "libnvshmem_host": "nvshmem",
}  # fmt: skip
CUDNN = re.search(r"cudnn\S*==([\d.]+)", " ".join(requires("torch")))[1].replace(".", ",")
# A function NAME that no source has, by the first pattern that is found in its name.
SUCCEEDS = "^__cuda(Unr|R)egister|^cuda(Profiler|FuncSet|KernelSet|ThreadExchange)"
FUNCTIONS = {
    "^cupti.*String": 'int NAME(int e, const char **s) { *s = "stand-in"; return 0; }',
    "String|Name|Error$": 'const char *NAME(void) { return "not computed by the stand-in"; }',
    # torch refuses an older cuDNN than it was built with.
    "^cudnnGetProperty$": f"int NAME(int i, int *v) {{ *v = (int[]){{{CUDNN}}}[i]; return 0; }}",
    f"{SUCCEEDS}|^cublas.*(Create|Destroy|Set|Get)": "int NAME(void) { return 0; }",
    "^cublas": 'int NAME(void) { return standin_library_launch("NAME"); }',
    "": 'int NAME(void) { return standin_refuse("NAME"); }',
}


def asked():
    """Of each NVIDIA library that torch links: the functions it calls, its symbols' version."""
    sonames, versions = set(), {}
    for library in TORCH.glob("lib/lib*.so"):
        needed = check_output(["objdump", "-p", library], text=True)
        sonames |= set(re.findall(r"NEEDED +(lib(?:cu|nccl|nv)\S+)", needed))
        undefined = check_output(["nm", "-D", "--undefined-only", library], text=True)
        versions |= dict(re.findall(r" U (\w+)@?(\S*)", undefined))
    for soname in sorted(sonames, key=lambda name: "cudart" not in name):  # the others link it
        base = soname.partition(".so")[0]
        prefix = PREFIXES.get(base, base.removeprefix("lib"))
        names = sorted(n for n in versions if re.match(prefix, n))
        yield soname, base, names, next((versions[n] for n in names), "") or soname


def generated(names):
    """The source of functions, which another source may define instead."""
    lines = ["int standin_refuse(const char *), standin_library_launch(const char *);"]
    for name in names:
        body = next(text for pattern, text in FUNCTIONS.items() if re.search(pattern, name))
        lines.append(f"__attribute__((weak)) {body.replace('NAME', name)}")
    return "\n".join(lines)


def c_library(folder, soname, *sources_and_flags):
    flags = ["-O2", "-g", "-Wall", "-fPIC", "-shared", *INCLUDES, f"-Wl,-soname,{soname}"]
    check_call(["gcc", *flags, "-o", folder / soname, *sources_and_flags, "-lpthread", "-ldl"])


def build(folder):
    folder.mkdir(parents=True, exist_ok=True)
    runtime = []
    for soname, base, names, version in asked():
        more, versions = folder / f"{base}.c", folder / f"{base}.map"
        more.write_text(generated(names))
        versions.write_text(f"{version} {{ global: *; }};\n")
        flags = [*runtime, f"-Wl,--version-script={versions}"]
        c_library(folder, soname, *HERE.glob(more.name), more, *flags)
        runtime = runtime or [f"-L{folder}", f"-l:{soname}", "-Wl,-rpath,$ORIGIN"]
    c_library(folder, "libnvidia-ml.so.1", HERE.parent / "nvml.c", HERE / "nvml_more.c")
    headers = [f"-isystem{TORCH}/include", f"-isystem{TORCH}/include/torch/csrc/api/include"]
    torch = [f"-L{TORCH}/lib", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Wno-sign-compare", *INCLUDES]
    kernels = ["-o", folder / "libstandin_kernels.so", HERE / "kernels.cpp"]
    check_call(["g++", *flags, *headers, *kernels, *torch, *runtime, f"-Wl,-rpath-link,{folder}"])


if __name__ == "__main__":
    to = Path(sys.argv[1]).resolve()
    build(to)
    load = f"os.environ.setdefault('STANDIN_CUDA_LIBRARIES', {str(to)!r}); import standin_cuda"
    (SITE / "standin_cuda.pth").write_text(f"{HERE}\nimport os; {load}\n")

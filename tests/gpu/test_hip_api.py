"""native/gpu/hip_api.h and hsa_api.h against AMD's published headers and the distribution's real libraries.

The packages are fetched once (real_hip.py); where they cannot be, these tests fail and say so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import real_hip
from shim import ROOT, find_compiler

API = ROOT / "native" / "gpu" / "hip_api.h"
HSA = ROOT / "native" / "gpu" / "hsa_api.h"


@pytest.fixture(scope="module")
def packages() -> Path:
    try:
        return real_hip.fetch()
    except real_hip.Unavailable as error:
        pytest.fail(f"the real HIP runtime could not be fetched: {error}")


def functions() -> list[str]:
    """Every function of the driver's tables, which ROCm 5.2 has all of: HSA's are found in what libamdhip64 links."""
    names = re.findall(r"X\((hip\w+),", API.read_text()) + re.findall(r"X\((hsa_\w+),", HSA.read_text())
    assert len(names) > 35
    return [*names, "hipGetErrorName", "hipGetDeviceProperties"]


def test_every_function_of_the_table_is_in_the_real_runtime(packages: Path) -> None:
    code = "import ctypes, sys\nlibrary = ctypes.CDLL(sys.argv[1])\n"
    code += "print([name for name in sys.argv[2:] if not hasattr(library, name)])"
    command = [sys.executable, "-c", code, str(real_hip.library()), *functions()]
    run = subprocess.run(command, capture_output=True, text=True, env=real_hip.environment())
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


def test_the_real_runtime_reports_no_device(packages: Path) -> None:
    code = "from apu_engine import _native\ntry:\n _native.Device('hip')\n"
    code += "except _native.UnsupportedError as error:\n print(error)"
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=real_hip.environment(), timeout=60)
    assert run.returncode == 0, run.stderr
    assert re.search(r"libamdhip64\.so\.\d.* shows no usable device: hipError\w+ \(\d+\)\n$", run.stdout)


CHECKS = """
#define __HIP_PLATFORM_AMD__
#include <hip/hip_runtime_api.h>
#include <gpu/hip_api.h>
#include <type_traits>
namespace ours = apu::gpu::hip;
#define SAME(mine, theirs) static_assert(int64_t(ours::mine) == int64_t(theirs), #theirs)
SAME(kSuccess, hipSuccess);
SAME(kOutOfMemory, hipErrorOutOfMemory);
SAME(kNoDevice, hipErrorNoDevice);
SAME(kNotReady, hipErrorNotReady);
SAME(kUnknown, hipErrorUnknown);
SAME(kHostToDevice, hipMemcpyHostToDevice);
SAME(kDeviceToHost, hipMemcpyDeviceToHost);
SAME(kDeviceToDevice, hipMemcpyDeviceToDevice);
SAME(kHostPortable, hipHostMallocPortable);
SAME(kHostMapped, hipHostMallocMapped);
SAME(kHostCoherent, hipHostMallocCoherent);
SAME(kRegisterMapped, hipHostRegisterMapped);
SAME(kRegisterReadOnly, hipExtHostRegisterCoarseGrained);
SAME(kSetAccessedBy, hipMemAdviseSetAccessedBy);
SAME(kUnsetAccessedBy, hipMemAdviseUnsetAccessedBy);
SAME(kSetCoarseGrain, hipMemAdviseSetCoarseGrain);
SAME(kCoherencyMode, hipMemRangeAttributeCoherencyMode);
SAME(kFineGrain, hipMemRangeCoherencyModeFineGrain);
SAME(kCoarseGrain, hipMemRangeCoherencyModeCoarseGrain);
SAME(kStreamNonBlocking, hipStreamNonBlocking);
SAME(kEventDefault, hipEventDefault);
SAME(kEventDisableTiming, hipEventDisableTiming);
SAME(kCaptureThreadLocal, hipStreamCaptureModeThreadLocal);

// A parameter of ours and theirs are passed alike: pointers to something, or integers of one size.
template <typename A, typename B> constexpr bool alike =
    std::is_pointer_v<A> ? std::is_pointer_v<B> : !std::is_pointer_v<B> && sizeof(A) == sizeof(B);
template <typename A, typename B> struct Alike;
template <typename... A, typename R, typename... B> struct Alike<int (*)(A...), R (*)(B...)> {
  static_assert(sizeof...(A) == sizeof...(B));
  static constexpr bool value = (alike<A, B> && ...) && sizeof(R) == sizeof(int);
};
#define CHECK(name, arguments) static_assert(Alike<decltype(ours::Table::name), decltype(&::name)>::value, #name);
// Overloads for C++ hide these two; the C functions have void **.
hipError_t plain_malloc(void **, size_t);
hipError_t plain_host_malloc(void **, size_t, unsigned);
#define hipMalloc plain_malloc
#define hipHostMalloc plain_host_malloc
"""

OLD = """
using Theirs = HIP_PROPS;
#define AT(mine, theirs) static_assert(offsetof(ours::OUR_PROPS, mine) == offsetof(Theirs, theirs), #theirs)
AT(name, name);
AT(total_global_mem, totalGlobalMem);
AT(shared_mem_per_block, sharedMemPerBlock);
AT(warp_size, warpSize);
AT(multi_processor_count, multiProcessorCount);
AT(l2_cache_size, l2CacheSize);
AT(max_threads_per_multi_processor, maxThreadsPerMultiProcessor);
AT(max_shared_memory_per_multi_processor, maxSharedMemoryPerMultiProcessor);
AT(gcn_arch_name, gcnArchName);
AT(integrated, integrated);
AT(pageable_memory_access, pageableMemoryAccess);
AT(pageable_memory_access_uses_host_page_tables, pageableMemoryAccessUsesHostPageTables);
static_assert(sizeof(ours::OUR_PROPS) >= sizeof(Theirs));
"""


def test_numbers_and_signatures_are_the_published_headers(packages: Path, tmp_path: Path) -> None:
    header = (packages / "usr/include/hip/hip_runtime_api.h").read_text()
    new = "hipDeviceProp_tR0600" in header  # ROCm 6.0 and later publish both, ROCm 5 only what is R0000 now
    checks = CHECKS
    for name, arguments in re.findall(r"X\((hip\w+),\s*\\?\s*(\(.*?\))\)", API.read_text(), flags=re.S):
        if name not in ("hipMalloc", "hipHostMalloc"):
            arguments = re.sub(r"\\\s*\n", "", arguments)
            checks = checks.replace("// Overloads", f"CHECK({name}, {arguments})\n// Overloads")
    old = OLD.replace("OUR_PROPS", "PropsR0000").replace(
        "HIP_PROPS", "hipDeviceProp_tR0000" if new else "hipDeviceProp_t"
    )
    source = tmp_path / "checks.cpp"
    source.write_text(checks + old + (OLD.replace("OUR_PROPS", "PropsR0600") if new else ""))
    includes = [f"-I{packages / 'usr/include'}", f"-I{ROOT / 'native'}"]
    run = subprocess.run([find_compiler(), "-std=c++20", "-fsyntax-only", "-w", *includes, source], capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


HSA_CHECKS = """
#include <hsa/hsa_ext_amd.h>
#include <gpu/hsa_api.h>
#include <type_traits>
namespace ours = apu::gpu::hsa;
#define SAME(mine, theirs) static_assert(int64_t(ours::mine) == int64_t(theirs), #theirs)
SAME(kSuccess, HSA_STATUS_SUCCESS);
SAME(kAgentInfoDevice, HSA_AGENT_INFO_DEVICE);
SAME(kDeviceIsGpu, HSA_DEVICE_TYPE_GPU);
SAME(kSvmGlobalFlag, HSA_AMD_SVM_ATTRIB_GLOBAL_FLAG);
SAME(kSvmReadOnly, HSA_AMD_SVM_ATTRIB_READ_ONLY);
SAME(kSvmAccessibleInPlace, HSA_AMD_SVM_ATTRIB_AGENT_ACCESSIBLE_IN_PLACE);
SAME(kSvmNoAccess, HSA_AMD_SVM_ATTRIB_AGENT_NO_ACCESS);
SAME(kSvmFineGrained, HSA_AMD_SVM_GLOBAL_FLAG_FINE_GRAINED);
SAME(kSvmCoarseGrained, HSA_AMD_SVM_GLOBAL_FLAG_COARSE_GRAINED);
SAME(kPoolFineGrained, HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_FINE_GRAINED);
SAME(kPoolCoarseGrained, HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED);
SAME(kPointerUnknown, HSA_EXT_POINTER_TYPE_UNKNOWN);
using Theirs = hsa_amd_pointer_info_t;
#define AT(mine, theirs) static_assert(offsetof(ours::PointerInfo, mine) == offsetof(Theirs, theirs), #theirs)
AT(size, size);
AT(type, type);
AT(agent_base, agentBaseAddress);
AT(host_base, hostBaseAddress);
AT(bytes, sizeInBytes);
AT(user_data, userData);
AT(owner, agentOwner);
AT(global_flags, global_flags);
static_assert(sizeof(ours::PointerInfo) == sizeof(Theirs));
static_assert(offsetof(ours::SvmPair, attribute) == offsetof(hsa_amd_svm_attribute_pair_t, attribute));
static_assert(offsetof(ours::SvmPair, value) == offsetof(hsa_amd_svm_attribute_pair_t, value));
static_assert(sizeof(ours::SvmPair) == sizeof(hsa_amd_svm_attribute_pair_t));
static_assert(sizeof(ours::Agent) == sizeof(hsa_agent_t) && std::is_class_v<hsa_agent_t>);
// A parameter of ours and theirs are passed alike: both pointers, both structs, or integers of one size.
template <typename A, typename B> constexpr bool alike =
    std::is_pointer_v<A> == std::is_pointer_v<B> && std::is_class_v<A> == std::is_class_v<B> && sizeof(A) == sizeof(B);
template <typename A, typename B> struct Alike;
template <typename... A, typename R, typename... B> struct Alike<int (*)(A...), R (*)(B...)> {
  static_assert(sizeof...(A) == sizeof...(B));
  static constexpr bool value = (alike<A, B> && ...) && sizeof(R) == sizeof(int);
};
#define CHECK(name, arguments) static_assert(Alike<decltype(ours::Table::name), decltype(&::name)>::value, #name);
APU_HSA_FUNCTIONS(CHECK)
"""


def test_hsa_is_as_its_headers_say(packages: Path, tmp_path: Path) -> None:
    source = tmp_path / "checks.cpp"
    source.write_text(HSA_CHECKS)
    includes = [f"-I{packages / 'usr/include'}", f"-I{ROOT / 'native'}"]
    run = subprocess.run([find_compiler(), "-std=c++20", "-fsyntax-only", "-w", *includes, source], capture_output=True)
    assert run.returncode == 0, run.stderr.decode()


# hipDeviceProp_tR0600 as hip_runtime_api.h of ROCm 6.0 to 7.0 lays it out (offsets of each field from the field list
# there; tinygrad's generated bindings, tinygrad/runtime/autogen/hip.py, state the same ones).
R0600 = {
    "name": 0,
    "total_global_mem": 288,
    "shared_mem_per_block": 296,
    "regs_per_block": 304,
    "warp_size": 308,
    "multi_processor_count": 388,
    "kernel_exec_timeout_enabled": 392,
    "integrated": 396,
    "l2_cache_size": 616,
    "persisting_l2_cache_max_size": 620,
    "max_threads_per_multi_processor": 624,
    "shared_mem_per_multiprocessor": 640,
    "pageable_memory_access": 672,
    "pageable_memory_access_uses_host_page_tables": 704,
    "gcn_arch_name": 1160,
    "max_shared_memory_per_multi_processor": 1416,
}


def test_the_properties_of_rocm_6(tmp_path: Path) -> None:
    source = tmp_path / "offsets.cpp"
    lines = [f"static_assert(offsetof(apu::gpu::hip::PropsR0600, {f}) == {at});" for f, at in R0600.items()]
    lines.append("static_assert(sizeof(apu::gpu::hip::PropsR0600) == 1472);")
    source.write_text("#include <gpu/hip_api.h>\n" + "\n".join(lines))
    subprocess.run([find_compiler(), "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'native'}", source], check=True)

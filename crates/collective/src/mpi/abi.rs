//! What the binary interfaces of MPI libraries disagree on: what a handle is, and the values of constants.
//!
//! There are three. OpenMPI's handles are pointers to objects that the library exports. MPICH's are integers, the same in
//! all libraries of its family since 2013 (Intel MPI, MVAPICH, Cray MPICH). The standard's own interface, since MPI 5.0,
//! has pointers with fixed small values. Functions have the same names and the same order of arguments in all three.

use std::ffi::{CStr, c_int, c_void};

use polyreme_net::environment::MpiFamily;

use super::dl::Library;
use crate::element::{DType, Reduce};

/// The binary interface of a library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Abi {
    /// OpenMPI's.
    OpenMpi,
    /// That of MPICH and its family.
    Mpich,
    /// The standard's, since MPI 5.0.
    Standard,
}

impl Abi {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Abi::OpenMpi => "OpenMPI's ABI",
            Abi::Mpich => "MPICH's ABI",
            Abi::Standard => "the standard ABI",
        }
    }

    /// `MPI_IN_PLACE`.
    pub(super) fn in_place(self) -> *const c_void {
        match self {
            Abi::OpenMpi | Abi::Standard => std::ptr::without_provenance(1),
            Abi::Mpich => std::ptr::without_provenance(usize::MAX),
        }
    }

    /// `MPI_STATUS_IGNORE`.
    pub(super) fn status_ignore(self) -> *mut c_void {
        match self {
            Abi::OpenMpi | Abi::Standard => std::ptr::null_mut(),
            Abi::Mpich => std::ptr::without_provenance_mut(1),
        }
    }

    /// `MPI_THREAD_SERIALIZED`: several threads make calls, one at a time.
    pub(super) fn thread_serialized(self) -> c_int {
        match self {
            Abi::OpenMpi | Abi::Mpich => 2,
            Abi::Standard => 2048,
        }
    }
}

/// Room for any text that a library writes: version texts of MPICH and of the standard are the longest, 8192.
pub(super) const TEXT_BYTES_MAX: usize = 8192;

/// The family of a library, from its version text.
pub(super) fn family_of(version: &str) -> MpiFamily {
    match version.trim_start().starts_with("Open MPI") {
        true => MpiFamily::OpenMpi,
        false => MpiFamily::Mpich,
    }
}

/// Objects that every library has from the start.
#[derive(Clone, Copy, Debug)]
pub(super) enum Constant {
    World,
    ErrorsReturn,
    Byte,
    Type(DType),
    Op(Reduce),
    NullType,
}

/// A handle as it is passed to functions.
pub(super) trait Handle: Copy + Send + Sync + 'static {
    /// The handle of an object that the library has from the start; `None` if the library does not have it.
    fn constant(which: Constant, abi: Abi, library: &Library) -> Option<Self>;

    /// What out-parameters hold before a call.
    const UNSET: Self;
}

/// MPICH's handles.
impl Handle for c_int {
    fn constant(which: Constant, _: Abi, _: &Library) -> Option<c_int> {
        Some(match which {
            Constant::World => 0x4400_0000,
            Constant::ErrorsReturn => 0x5400_0001,
            Constant::Byte => 0x4c00_010d,
            Constant::NullType => 0x0c00_0000,
            Constant::Type(dtype) => match dtype {
                DType::F32 => 0x4c00_040a,
                DType::F64 => 0x4c00_080b,
                DType::I32 => 0x4c00_0439,
                DType::I64 => 0x4c00_083a,
                DType::U8 | DType::Bool => 0x4c00_013b,
                DType::I8 => 0x4c00_0137,
                DType::F16 | DType::Bf16 => return None,
            },
            Constant::Op(reduce) => match reduce {
                Reduce::Max => 0x5800_0001,
                Reduce::Min => 0x5800_0002,
                Reduce::Sum => 0x5800_0003,
            },
        })
    }

    const UNSET: c_int = 0;
}

/// A handle of OpenMPI, or of the standard's interface: the address of an object, or a small number in its place. It is
/// only ever passed back to the library.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Pointer(*mut c_void);

// SAFETY: it is never dereferenced here; the library that gave it accepts it from any thread.
unsafe impl Send for Pointer {}
// SAFETY: as above.
unsafe impl Sync for Pointer {}

impl Handle for Pointer {
    fn constant(which: Constant, abi: Abi, library: &Library) -> Option<Pointer> {
        match abi {
            Abi::OpenMpi => library.symbol(openmpi_symbol(which)?).map(|symbol| Pointer(symbol.as_ptr())),
            Abi::Standard => Some(Pointer(std::ptr::without_provenance_mut(standard_value(which)?))),
            Abi::Mpich => unreachable!("MPICH's handles are integers"),
        }
    }

    const UNSET: Pointer = Pointer(std::ptr::null_mut());
}

/// The object that OpenMPI exports.
fn openmpi_symbol(which: Constant) -> Option<&'static CStr> {
    Some(match which {
        Constant::World => c"ompi_mpi_comm_world",
        Constant::ErrorsReturn => c"ompi_mpi_errors_return",
        Constant::Byte => c"ompi_mpi_byte",
        Constant::NullType => c"ompi_mpi_datatype_null",
        Constant::Type(dtype) => match dtype {
            DType::F32 => c"ompi_mpi_float",
            DType::F64 => c"ompi_mpi_double",
            DType::I32 => c"ompi_mpi_int32_t",
            DType::I64 => c"ompi_mpi_int64_t",
            DType::U8 | DType::Bool => c"ompi_mpi_uint8_t",
            DType::I8 => c"ompi_mpi_int8_t",
            DType::F16 | DType::Bf16 => return None,
        },
        Constant::Op(reduce) => match reduce {
            Reduce::Sum => c"ompi_mpi_op_sum",
            Reduce::Max => c"ompi_mpi_op_max",
            Reduce::Min => c"ompi_mpi_op_min",
        },
    })
}

/// The value that the standard fixes.
fn standard_value(which: Constant) -> Option<usize> {
    Some(match which {
        Constant::World => 0x101,
        Constant::ErrorsReturn => 0x143,
        Constant::Byte => 0x247,
        Constant::NullType => 0x200,
        Constant::Type(dtype) => match dtype {
            DType::F32 => 0x210,
            DType::F64 => 0x214,
            DType::I32 => 0x250,
            DType::I64 => 0x258,
            DType::U8 | DType::Bool => 0x241,
            DType::I8 => 0x240,
            DType::F16 | DType::Bf16 => return None,
        },
        Constant::Op(reduce) => match reduce {
            Reduce::Sum => 0x21,
            Reduce::Min => 0x22,
            Reduce::Max => 0x23,
        },
    })
}

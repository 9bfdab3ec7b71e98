//! The functions of an MPI library, by the type of its handles.

use std::ffi::{CStr, c_char, c_int, c_void};

use super::dl::Library;

/// A user-defined operator: elements, the elements they are reduced into, how many, their type.
pub(super) type Reducer = extern "C" fn(*const c_void, *mut c_void, *const c_int, *const c_void);

/// Declares a table of functions and how it is read from a library: each returns MPI's error code, 0 for success.
macro_rules! calls {
    ($($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        /// A library's functions. `H` is a handle.
        pub(super) struct Calls<H> {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl<H> Calls<H> {
            /// # Safety
            /// The library's handles are of type `H`.
            pub(super) unsafe fn load(library: &Library) -> Result<Calls<H>, String> {
                Ok(Calls {
                    $($name: {
                        const SYMBOL: &CStr = $symbol;
                        let symbol = library.symbol(SYMBOL);
                        let symbol = symbol.ok_or_else(|| format!("it has no {}", SYMBOL.to_string_lossy()))?;
                        // SAFETY: a function of this name has this signature in every MPI library, up to what a handle
                        // is, which the caller promises.
                        unsafe {
                            std::mem::transmute::<
                                std::ptr::NonNull<c_void>,
                                unsafe extern "C" fn($($arg),*) -> c_int,
                            >(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

type In = *const c_void;
type Out = *mut c_void;
type Counts = *const c_int;

calls! {
    initialized = c"MPI_Initialized" (*mut c_int);
    init_thread = c"MPI_Init_thread" (*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int);
    finalized = c"MPI_Finalized" (*mut c_int);
    finalize = c"MPI_Finalize" ();
    abort = c"MPI_Abort" (H, c_int);
    error_string = c"MPI_Error_string" (c_int, *mut c_char, *mut c_int);
    set_errhandler = c"MPI_Comm_set_errhandler" (H, H);
    rank = c"MPI_Comm_rank" (H, *mut c_int);
    size = c"MPI_Comm_size" (H, *mut c_int);
    type_contiguous = c"MPI_Type_contiguous" (c_int, H, *mut H);
    type_commit = c"MPI_Type_commit" (*mut H);
    type_free = c"MPI_Type_free" (*mut H);
    op_free = c"MPI_Op_free" (*mut H);
    op_create = c"MPI_Op_create" (Reducer, c_int, *mut H);
    comm_split = c"MPI_Comm_split" (H, c_int, c_int, *mut H);
    test = c"MPI_Test" (*mut H, *mut c_int, Out);
    barrier = c"MPI_Barrier" (H);
    all_reduce = c"MPI_Allreduce" (In, Out, c_int, H, H, H);
    reduce_scatter = c"MPI_Reduce_scatter" (In, Out, Counts, H, H, H);
    all_gather = c"MPI_Allgatherv" (In, c_int, H, Out, Counts, Counts, H, H);
    broadcast = c"MPI_Bcast" (Out, c_int, H, c_int, H);
    gather = c"MPI_Gatherv" (In, c_int, H, Out, Counts, Counts, H, c_int, H);
    scatter = c"MPI_Scatterv" (In, Counts, Counts, H, Out, c_int, H, c_int, H);
    all_to_all = c"MPI_Alltoallv" (In, Counts, Counts, H, Out, Counts, Counts, H, H);
    start_barrier = c"MPI_Ibarrier" (H, *mut H);
    start_all_reduce = c"MPI_Iallreduce" (In, Out, c_int, H, H, H, *mut H);
    start_reduce_scatter = c"MPI_Ireduce_scatter" (In, Out, Counts, H, H, H, *mut H);
    start_all_gather = c"MPI_Iallgatherv" (In, c_int, H, Out, Counts, Counts, H, H, *mut H);
    start_broadcast = c"MPI_Ibcast" (Out, c_int, H, c_int, H, *mut H);
    start_gather = c"MPI_Igatherv" (In, c_int, H, Out, Counts, Counts, H, c_int, H, *mut H);
    start_scatter = c"MPI_Iscatterv" (In, Counts, Counts, H, Out, c_int, H, c_int, H, *mut H);
    start_all_to_all = c"MPI_Ialltoallv" (In, Counts, Counts, H, Out, Counts, Counts, H, H, *mut H);
    start_send = c"MPI_Isend" (In, c_int, H, c_int, c_int, H, *mut H);
    start_recv = c"MPI_Irecv" (Out, c_int, H, c_int, c_int, H, *mut H);
}

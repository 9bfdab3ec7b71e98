//! The shim's functions, and the sums of half-precision types that MPI does not have. Unsafe code stands here and
//! nowhere else of the MPI side.

use std::ffi::{c_char, c_int, c_void};

use half::{bf16, f16};

use crate::element::{DType, Reduce};

type Reducer = extern "C" fn(*const c_void, *mut c_void, *const c_int, *const c_void);

unsafe extern "C" {
    fn polyreme_mpi_init(reducers: *const Reducer, rank: *mut c_int, size: *mut c_int) -> c_int;
    fn polyreme_mpi_finalize() -> c_int;
    fn polyreme_mpi_abort(code: c_int);
    fn polyreme_mpi_error_text(error: c_int, text: *mut c_char, len: *mut c_int) -> c_int;
    fn polyreme_mpi_error_text_max() -> c_int;
    fn polyreme_mpi_barrier() -> c_int;
    fn polyreme_mpi_all_reduce(data: *mut c_void, count: c_int, dtype: c_int, reduce: c_int) -> c_int;
    fn polyreme_mpi_reduce_scatter(
        data: *const c_void,
        own: *mut c_void,
        counts: *const c_int,
        dtype: c_int,
        reduce: c_int,
    ) -> c_int;
    fn polyreme_mpi_all_gather(
        data: *mut c_void,
        counts: *const c_int,
        starts: *const c_int,
        dtype: c_int,
    ) -> c_int;
    fn polyreme_mpi_broadcast(data: *mut c_void, count: c_int, dtype: c_int, root: c_int) -> c_int;
    fn polyreme_mpi_gather(
        mine: *const c_void,
        count: c_int,
        into: *mut c_void,
        counts: *const c_int,
        starts: *const c_int,
        dtype: c_int,
        root: c_int,
    ) -> c_int;
    fn polyreme_mpi_scatter(
        mine: *mut c_void,
        count: c_int,
        from: *const c_void,
        counts: *const c_int,
        starts: *const c_int,
        dtype: c_int,
        root: c_int,
    ) -> c_int;
    fn polyreme_mpi_all_to_all(
        send: *const c_void,
        send_counts: *const c_int,
        send_starts: *const c_int,
        recv: *mut c_void,
        recv_counts: *const c_int,
        recv_starts: *const c_int,
        dtype: c_int,
    ) -> c_int;
    fn polyreme_mpi_send(data: *const c_void, count: c_int, dtype: c_int, to: c_int) -> c_int;
    fn polyreme_mpi_recv(data: *mut c_void, count: c_int, dtype: c_int, from: c_int) -> c_int;
}

/// Ranges of a buffer, one a rank.
pub(super) struct Parts {
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

impl Parts {
    /// From cuts; `None` if a number is too large for MPI.
    pub(super) fn of(cuts: &[usize]) -> Option<Parts> {
        let counts = cuts.windows(2).map(|c| c_int::try_from(c[1] - c[0]).ok()).collect::<Option<_>>()?;
        let starts =
            cuts[..cuts.len() - 1].iter().map(|&c| c_int::try_from(c).ok()).collect::<Option<_>>()?;
        Some(Parts { counts, starts })
    }
}

pub(super) fn dtype_code(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 0,
        DType::F64 => 1,
        DType::F16 => 2,
        DType::Bf16 => 3,
        DType::I32 => 4,
        DType::I64 => 5,
        DType::U8 => 6,
        DType::I8 => 7,
        DType::Bool => 8,
    }
}

fn reduce_code(reduce: Reduce) -> c_int {
    match reduce {
        Reduce::Sum => 0,
        Reduce::Max => 1,
        Reduce::Min => 2,
    }
}

/// MPI's error code, if it is one.
fn outcome(code: c_int) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    // SAFETY: the buffer is as long as MPI says that texts are at most.
    let text = unsafe {
        let mut text = vec![0u8; polyreme_mpi_error_text_max() as usize + 1];
        let mut len = 0;
        polyreme_mpi_error_text(code, text.as_mut_ptr().cast(), &mut len);
        text.truncate(len.max(0) as usize);
        text
    };
    Err(format!("MPI error {code}: {}", String::from_utf8_lossy(&text)))
}

/// Starts MPI, if it is not; this rank and how many there are.
pub(super) fn init() -> Result<(usize, usize), String> {
    let reducers: [Reducer; 6] = [
        combine::<f16, 0>,
        combine::<f16, 1>,
        combine::<f16, 2>,
        combine::<bf16, 0>,
        combine::<bf16, 1>,
        combine::<bf16, 2>,
    ];
    let (mut rank, mut size) = (0, 0);
    // SAFETY: six functions with the signature of an MPI operator, which live for ever.
    outcome(unsafe { polyreme_mpi_init(reducers.as_ptr(), &mut rank, &mut size) })?;
    Ok((rank as usize, size as usize))
}

pub(super) fn finalize() -> Result<(), String> {
    // SAFETY: no buffer is given.
    outcome(unsafe { polyreme_mpi_finalize() })
}

/// Ends all ranks.
pub(super) fn abort(code: i32) {
    // SAFETY: no buffer is given.
    unsafe { polyreme_mpi_abort(code) }
}

pub(super) fn barrier() -> Result<(), String> {
    // SAFETY: no buffer is given.
    outcome(unsafe { polyreme_mpi_barrier() })
}

/// # Safety
/// `data` holds `count` elements that nobody else touches.
pub(super) unsafe fn all_reduce(
    data: *mut u8,
    count: c_int,
    dtype: DType,
    reduce: Reduce,
) -> Result<(), String> {
    // SAFETY: the caller's promise.
    outcome(unsafe { polyreme_mpi_all_reduce(data.cast(), count, dtype_code(dtype), reduce_code(reduce)) })
}

/// # Safety
/// `data` holds the elements of all parts, `own` those of this rank's; nobody else touches them.
pub(super) unsafe fn reduce_scatter(
    data: *const u8,
    own: *mut u8,
    parts: &Parts,
    dtype: DType,
    reduce: Reduce,
) -> Result<(), String> {
    let (dtype, reduce) = (dtype_code(dtype), reduce_code(reduce));
    // SAFETY: the caller's promise; there is a count for each rank.
    outcome(unsafe {
        polyreme_mpi_reduce_scatter(data.cast(), own.cast(), parts.counts.as_ptr(), dtype, reduce)
    })
}

/// # Safety
/// `data` holds the elements of all parts, and nobody else touches it.
pub(super) unsafe fn all_gather(data: *mut u8, parts: &Parts, dtype: DType) -> Result<(), String> {
    let (counts, starts) = (parts.counts.as_ptr(), parts.starts.as_ptr());
    // SAFETY: the caller's promise.
    outcome(unsafe { polyreme_mpi_all_gather(data.cast(), counts, starts, dtype_code(dtype)) })
}

/// # Safety
/// `data` holds `count` elements that nobody else touches.
pub(super) unsafe fn broadcast(data: *mut u8, count: c_int, dtype: DType, root: usize) -> Result<(), String> {
    // SAFETY: the caller's promise.
    outcome(unsafe { polyreme_mpi_broadcast(data.cast(), count, dtype_code(dtype), root as c_int) })
}

/// # Safety
/// `mine` holds `count` elements and, at the root, `into` those of all parts.
pub(super) unsafe fn gather(
    mine: *const u8,
    count: c_int,
    into: *mut u8,
    parts: &Parts,
    dtype: DType,
    root: usize,
) -> Result<(), String> {
    let (counts, starts, dtype) = (parts.counts.as_ptr(), parts.starts.as_ptr(), dtype_code(dtype));
    // SAFETY: the caller's promise.
    outcome(unsafe {
        polyreme_mpi_gather(mine.cast(), count, into.cast(), counts, starts, dtype, root as c_int)
    })
}

/// # Safety
/// `mine` holds `count` elements and, at the root, `from` those of all parts.
pub(super) unsafe fn scatter(
    mine: *mut u8,
    count: c_int,
    from: *const u8,
    parts: &Parts,
    dtype: DType,
    root: usize,
) -> Result<(), String> {
    let (counts, starts, dtype) = (parts.counts.as_ptr(), parts.starts.as_ptr(), dtype_code(dtype));
    // SAFETY: the caller's promise.
    outcome(unsafe {
        polyreme_mpi_scatter(mine.cast(), count, from.cast(), counts, starts, dtype, root as c_int)
    })
}

/// # Safety
/// `send` and `recv` hold the elements of their parts.
pub(super) unsafe fn all_to_all(
    send: *const u8,
    send_parts: &Parts,
    recv: *mut u8,
    recv_parts: &Parts,
    dtype: DType,
) -> Result<(), String> {
    // SAFETY: the caller's promise.
    outcome(unsafe {
        polyreme_mpi_all_to_all(
            send.cast(),
            send_parts.counts.as_ptr(),
            send_parts.starts.as_ptr(),
            recv.cast(),
            recv_parts.counts.as_ptr(),
            recv_parts.starts.as_ptr(),
            dtype_code(dtype),
        )
    })
}

/// # Safety
/// `data` holds `count` elements.
pub(super) unsafe fn send(data: *const u8, count: c_int, dtype: DType, to: usize) -> Result<(), String> {
    // SAFETY: the caller's promise.
    outcome(unsafe { polyreme_mpi_send(data.cast(), count, dtype_code(dtype), to as c_int) })
}

/// # Safety
/// `data` holds `count` elements that nobody else touches.
pub(super) unsafe fn recv(data: *mut u8, count: c_int, dtype: DType, from: usize) -> Result<(), String> {
    // SAFETY: the caller's promise.
    outcome(unsafe { polyreme_mpi_recv(data.cast(), count, dtype_code(dtype), from as c_int) })
}

/// An MPI operator on half-precision floats: 0 adds, 1 takes the larger, 2 the smaller.
extern "C" fn combine<T, const OP: u8>(
    from: *const c_void,
    to: *mut c_void,
    count: *const c_int,
    _: *const c_void,
) where
    T: Copy + PartialOrd + std::ops::Add<Output = T>,
{
    // SAFETY: MPI gives two buffers of as many elements of the two-byte type, aligned as the caller's buffers are.
    unsafe {
        let n = (*count).max(0) as usize;
        let (from, to) = (from.cast::<T>(), to.cast::<T>());
        for i in 0..n {
            let (a, b) = (to.add(i).read_unaligned(), from.add(i).read_unaligned());
            let c = match OP {
                0 => a + b,
                1 if b > a => b,
                2 if b < a => b,
                _ => a,
            };
            to.add(i).write_unaligned(c);
        }
    }
}

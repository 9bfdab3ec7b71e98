//! A started MPI library: its functions, and the handles of the types and operators that ranks use.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::abi::{Abi, Constant, Handle, TEXT_BYTES_MAX};
use super::calls::Calls;
use super::find::MpiLibrary;
use super::operators::{OPERATORS, TYPES, operator_idx, type_idx};
use crate::element::{DType, Reduce};

/// Bytes of a half-precision float.
const HALF_BYTES: c_int = 2;
/// The operator is commutative.
const COMMUTES: c_int = 1;

/// A started library.
pub(super) struct Runtime<H> {
    pub(super) calls: Calls<H>,
    /// Held by the thread that is in a call.
    turn: Mutex<()>,
    pub(super) abi: Abi,
    pub(super) world: H,
    pub(super) null_type: H,
    types: Types<H>,
    ops: [H; 3],
    /// Our own operators, for the types that need them.
    own_ops: [[H; 3]; TYPES],
}

/// Handles of element types. Half-precision ones are two bytes to MPI.
struct Types<H> {
    f32: H,
    f64: H,
    i32: H,
    i64: H,
    u8: H,
    i8: H,
    half: H,
}

impl<H: Handle> Runtime<H> {
    /// Starts MPI, unless it has been started.
    ///
    /// # Safety
    /// The library's handles are of type `H`.
    pub(super) unsafe fn start(found: &MpiLibrary) -> Result<Runtime<H>, String> {
        let library = &found.library;
        library.join_global(&found.path).map_err(|why| format!("it cannot be loaded: {why:?}"))?;
        // SAFETY: the caller's promise.
        let calls = unsafe { Calls::<H>::load(library)? };
        let constant = |which: Constant| {
            H::constant(which, found.abi, library).ok_or_else(|| format!("it has no {which:?}"))
        };
        let (world, errors_return) = (constant(Constant::World)?, constant(Constant::ErrorsReturn)?);
        let mut already = 0;
        // SAFETY: out-parameters are valid, and handles are the library's own.
        unsafe {
            check(&calls, (calls.initialized)(&mut already))?;
            if already == 0 {
                let (wanted, mut level) = (found.abi.thread_serialized(), 0);
                let (no_args, no_argv) = (std::ptr::null_mut(), std::ptr::null_mut());
                check(&calls, (calls.init_thread)(no_args, no_argv, wanted, &mut level))?;
                if level < wanted {
                    return Err("it was built without threads: MPI_THREAD_SERIALIZED is needed".into());
                }
            }
            check(&calls, (calls.set_errhandler)(world, errors_return))?;
        }
        let mut half = H::UNSET;
        let mut own_ops = [[H::UNSET; 3]; TYPES];
        let byte = constant(Constant::Byte)?;
        // SAFETY: as above; the operators are static.
        unsafe {
            check(&calls, (calls.type_contiguous)(HALF_BYTES, byte, &mut half))?;
            check(&calls, (calls.type_commit)(&mut half))?;
            for (ops, operators) in own_ops.iter_mut().zip(OPERATORS) {
                for (op, operator) in ops.iter_mut().zip(operators) {
                    check(&calls, (calls.op_create)(operator, COMMUTES, op))?;
                }
            }
        }
        let element = |dtype| constant(Constant::Type(dtype));
        let types = Types {
            f32: element(DType::F32)?,
            f64: element(DType::F64)?,
            i32: element(DType::I32)?,
            i64: element(DType::I64)?,
            u8: element(DType::U8)?,
            i8: element(DType::I8)?,
            half,
        };
        let op = |reduce| constant(Constant::Op(reduce));
        let ops = [op(Reduce::Sum)?, op(Reduce::Max)?, op(Reduce::Min)?];
        let (abi, null_type) = (found.abi, constant(Constant::NullType)?);
        let turn = Mutex::new(());
        Ok(Runtime { calls, turn, abi, world, null_type, types, ops, own_ops })
    }

    /// Waits until no other thread is in a call, and keeps others out until this is dropped.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls a request until it is done.
    pub(super) fn wait(&self, mut request: H) -> Result<(), String> {
        loop {
            let mut done = 0;
            let turn = self.turn();
            // SAFETY: the request is one that was started, and out-parameters are valid.
            let code = unsafe { (self.calls.test)(&mut request, &mut done, self.abi.status_ignore()) };
            drop(turn);
            self.check(code)?;
            if done != 0 {
                return Ok(());
            }
            // Lets other communicators of this rank, and other ranks on this core, run meanwhile.
            std::thread::yield_now();
        }
    }

    /// MPI's handle of an element type.
    pub(super) fn dtype(&self, dtype: DType) -> H {
        match dtype {
            DType::F32 => self.types.f32,
            DType::F64 => self.types.f64,
            DType::F16 | DType::Bf16 => self.types.half,
            DType::I32 => self.types.i32,
            DType::I64 => self.types.i64,
            DType::U8 | DType::Bool => self.types.u8,
            DType::I8 => self.types.i8,
        }
    }

    /// MPI's handle of a reduction of an element type.
    pub(super) fn op(&self, dtype: DType, reduce: Reduce) -> H {
        // Of bytes that are zero or one, the largest says whether any is true.
        let any = dtype == DType::Bool && reduce == Reduce::Sum;
        let at = operator_idx(if any { Reduce::Max } else { reduce });
        type_idx(dtype).map_or(self.ops[at], |own| self.own_ops[own][at])
    }

    /// `MPI_IN_PLACE`.
    pub(super) fn in_place(&self) -> *const c_void {
        self.abi.in_place()
    }

    /// What an error code means.
    pub(super) fn check(&self, code: c_int) -> Result<(), String> {
        check(&self.calls, code)
    }

    /// Ends all ranks.
    pub(super) fn abort(&self) {
        // SAFETY: the world's handle is the library's own.
        unsafe { (self.calls.abort)(self.world, 1) };
    }
}

impl<H> Drop for Runtime<H> {
    /// Ends MPI, on all ranks at the same time. There is no one left to report an error to.
    fn drop(&mut self) {
        let mut over = 0;
        // SAFETY: the out-parameter is valid.
        unsafe {
            (self.calls.finalized)(&mut over);
            if over == 0 {
                // MPICH warns of handles that were not freed.
                (self.calls.type_free)(&mut self.types.half);
                self.own_ops.iter_mut().flatten().for_each(|op| {
                    (self.calls.op_free)(op);
                });
                (self.calls.finalize)();
            }
        }
    }
}

fn check<H>(calls: &Calls<H>, code: c_int) -> Result<(), String> {
    if code == 0 {
        return Ok(());
    }
    let mut text = vec![0u8; TEXT_BYTES_MAX];
    let mut len = 0;
    // SAFETY: the buffer is longer than any text of MPI.
    unsafe { (calls.error_string)(code, text.as_mut_ptr().cast(), &mut len) };
    text.truncate(len.max(0) as usize);
    Err(format!("MPI error {code}: {}", String::from_utf8_lossy(&text)))
}

//! What can be computed: ops, instructions, and expressions of them. Plain data; nothing here runs.

use std::fmt;

use polyreme_dtype::DType;

/// A function of one value.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Unary {
    /// −x.
    Neg,
    /// eˣ.
    Exp,
    /// The natural logarithm.
    Ln,
    /// The square root.
    Sqrt,
    /// 1/√x, not approximated.
    Rsqrt,
    /// 1/x.
    Recip,
    /// The hyperbolic tangent.
    Tanh,
    /// 1/(1 + e⁻ˣ).
    Sigmoid,
    /// max(x, 0).
    Relu,
    /// x, or the factor times x where x is not above 0.
    LeakyRelu(f32),
    /// x, or the factor times eˣ − 1 where x is not above 0.
    Elu(f32),
    /// x·Φ(x), with the error function.
    Gelu,
    /// The tanh form of GELU.
    GeluTanh,
    /// x·sigmoid(x).
    Silu,
    /// The error function.
    Erf,
    /// |x|.
    Abs,
    /// x².
    Square,
    /// The sine.
    Sin,
    /// The cosine.
    Cos,
    /// ln(1 + eˣ), without overflow.
    Softplus,
    /// −1, 0 or 1; NaN gives 0.
    Sign,
    /// The integer below.
    Floor,
    /// x times a number.
    Scale(f32),
    /// x plus a number.
    Offset(f32),
    /// x to a fixed power.
    Powf(f32),
    /// x between two numbers; NaN stays.
    Clamp(f32, f32),
    /// 1 where x > 0, else 0.
    Positive,
    /// The nearest f16, as an f32: what a value becomes that is stored in f16 and read again. NaN stays.
    RoundF16,
    /// The nearest bf16, as an f32. NaN stays.
    RoundBf16,
}

/// A function of two values. The gradients take `dy` first.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Binary {
    /// a + b.
    Add,
    /// a − b.
    Sub,
    /// a·b.
    Mul,
    /// a/b.
    Div,
    /// The greater; NaN if either is.
    Max,
    /// The smaller; NaN if either is.
    Min,
    /// a to the power b.
    Pow,
    /// 1 where a > b, else 0.
    Greater,
    /// 1 where a ≥ b, else 0.
    GreaterEqual,
    /// 1 where a = b, else 0.
    Equal,
    /// (dy, y or x): dy where y > 0, else 0.
    ReluGrad,
    /// (dy, y): dy·(1 − y²).
    TanhGrad,
    /// (dy, y): dy·y·(1 − y).
    SigmoidGrad,
    /// (dy, x): dy·(Φ(x) + x·φ(x)).
    GeluGrad,
    /// (dy, x): dy times the derivative of the tanh form of GELU.
    GeluTanhGrad,
    /// (dy, x): dy·s·(1 + x·(1 − s)), s = sigmoid(x).
    SiluGrad,
    /// (dy, x): dy·sigmoid(x).
    SoftplusGrad,
    /// (dy, x): dy, or the factor times dy where x is not above 0.
    LeakyReluGrad(f32),
    /// (dy, x): dy, or the factor times dy·eˣ where x is not above 0.
    EluGrad(f32),
}

/// A register: inputs come first, then one for each instruction.
pub type Reg = u8;

/// One instruction; its result is the next register.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Instr {
    /// The same number everywhere.
    Const(f32),
    /// A function of one register.
    Unary(Unary, Reg),
    /// A function of two registers.
    Binary(Binary, Reg, Reg),
    /// The second register where the first is not 0, else the third.
    Select(Reg, Reg, Reg),
}

impl Instr {
    /// The registers it reads.
    pub(crate) fn args(&self) -> ([Reg; 3], usize) {
        match *self {
            Instr::Const(_) => ([0; 3], 0),
            Instr::Unary(_, a) => ([a, 0, 0], 1),
            Instr::Binary(_, a, b) => ([a, b, 0], 2),
            Instr::Select(a, b, c) => ([a, b, c], 3),
        }
    }
}

/// A straight-line program over registers: `0..n_inputs` are the inputs, then one register per instruction.
#[derive(Clone, PartialEq, Debug)]
pub struct Expr {
    n_inputs: usize,
    instrs: Vec<Instr>,
    outputs: Vec<Reg>,
}

/// Why an expression, or its use with shapes, is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExprError {
    /// More than [`Expr::INPUTS_MAX`] inputs.
    TooManyInputs(usize),
    /// More than [`Expr::INSTRS_MAX`] instructions.
    TooManyInstrs(usize),
    /// No output, or more than [`Expr::OUTPUTS_MAX`].
    OutputCount(usize),
    /// The instruction reads a register that is not computed before it.
    UnknownReg {
        /// Which instruction.
        instr: usize,
        /// Which register.
        reg: Reg,
    },
    /// An output is a register that does not exist.
    UnknownOutput(Reg),
    /// The number of input shapes is not the number of inputs.
    InputCount {
        /// How many shapes were given.
        shapes: usize,
        /// How many inputs the expression has.
        inputs: usize,
    },
    /// An input's shape does not broadcast to the output's.
    Broadcast {
        /// Which input.
        input: usize,
        /// Its shape.
        shape: Vec<usize>,
        /// The output's shape.
        out: Vec<usize>,
    },
    /// More than [`Expr::RANK_MAX`] dims.
    Rank(usize),
    /// The number of output formats is not the number of outputs.
    OutputFormats {
        /// How many formats were given.
        formats: usize,
        /// How many outputs the expression has.
        outputs: usize,
    },
    /// Not a type that expressions read or write.
    Format(DType),
}

impl fmt::Display for ExprError {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            ExprError::TooManyInputs(n) => {
                write!(f, "expression has {n} inputs, split it below {}", Expr::INPUTS_MAX + 1)
            }
            ExprError::TooManyInstrs(n) => {
                write!(f, "expression has {n} instructions, split it below {}", Expr::INSTRS_MAX + 1)
            }
            ExprError::OutputCount(n) => {
                write!(f, "expression has {n} outputs, give it 1 to {}", Expr::OUTPUTS_MAX)
            }
            ExprError::UnknownReg { instr, reg } => {
                write!(f, "instruction {instr} reads register {reg}, which is not computed before it")
            }
            ExprError::UnknownOutput(reg) => write!(f, "output register {reg} does not exist"),
            ExprError::InputCount { shapes, inputs } => {
                write!(f, "{shapes} input shapes for {inputs} inputs, give one for each")
            }
            ExprError::Broadcast { input, shape, out } => {
                write!(f, "input {input} of shape {shape:?} does not broadcast to {out:?}")
            }
            ExprError::OutputFormats { formats, outputs } => {
                write!(f, "{formats} output formats for {outputs} outputs, give one for each")
            }
            ExprError::Format(dtype) => {
                write!(f, "expressions do not read or write {dtype}, cast it to f32, f16 or bf16")
            }
            ExprError::Rank(n) => write!(f, "shape has {n} dims, at most {} are supported", Expr::RANK_MAX),
        }
    }
}

impl std::error::Error for ExprError {}

impl Expr {
    /// The most inputs.
    pub const INPUTS_MAX: usize = 16;
    /// The most instructions.
    pub const INSTRS_MAX: usize = 64;
    /// The most outputs.
    pub const OUTPUTS_MAX: usize = 4;
    /// The most dims of the output's shape.
    pub const RANK_MAX: usize = 8;

    /// Checks the counts, and that each register is computed before it is read.
    pub fn new(n_inputs: usize, instrs: Vec<Instr>, outputs: Vec<Reg>) -> Result<Expr, ExprError> {
        if n_inputs > Expr::INPUTS_MAX {
            return Err(ExprError::TooManyInputs(n_inputs));
        }
        if instrs.len() > Expr::INSTRS_MAX {
            return Err(ExprError::TooManyInstrs(instrs.len()));
        }
        if outputs.is_empty() || outputs.len() > Expr::OUTPUTS_MAX {
            return Err(ExprError::OutputCount(outputs.len()));
        }
        for (i, instr) in instrs.iter().enumerate() {
            let (args, n) = instr.args();
            if let Some(&reg) = args[..n].iter().find(|r| usize::from(**r) >= n_inputs + i) {
                return Err(ExprError::UnknownReg { instr: i, reg });
            }
        }
        if let Some(&reg) = outputs.iter().find(|r| usize::from(**r) >= n_inputs + instrs.len()) {
            return Err(ExprError::UnknownOutput(reg));
        }
        Ok(Expr { n_inputs, instrs, outputs })
    }

    /// One op of one input.
    pub fn unary(op: Unary) -> Expr {
        Expr { n_inputs: 1, instrs: vec![Instr::Unary(op, 0)], outputs: vec![1] }
    }

    /// One op of two inputs.
    pub fn binary(op: Binary) -> Expr {
        Expr { n_inputs: 2, instrs: vec![Instr::Binary(op, 0, 1)], outputs: vec![2] }
    }

    /// How many inputs.
    pub fn n_inputs(&self) -> usize {
        self.n_inputs
    }

    /// The instructions.
    pub fn instrs(&self) -> &[Instr] {
        &self.instrs
    }

    /// The registers that are the outputs.
    pub fn outputs(&self) -> &[Reg] {
        &self.outputs
    }
}

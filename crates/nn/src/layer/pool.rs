//! Pooling of images `[n, h, w, c]`.

use polyreme_graph::op::Window;
use polyreme_graph::{Builder, Tensor, Traced};

/// `torch.nn.MaxPool2d`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MaxPool2d {
    /// Rows and columns of the window.
    pub kernel: (usize, usize),
    /// The stride: pixels from one window to the next.
    pub stride: (usize, usize),
    /// Padding on each side, which is never the maximum.
    pub padding: (usize, usize),
}

impl MaxPool2d {
    /// A square window, without padding.
    pub fn new(kernel: usize, stride: usize) -> MaxPool2d {
        MaxPool2d { kernel: (kernel, kernel), stride: (stride, stride), padding: (0, 0) }
    }

    /// `[n, h, w, c]` → `[n, h', w', c]`.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        let &MaxPool2d { kernel, stride, padding } = self;
        b.layer(name, |b| b.max_pool(x, Window::Fixed { kernel, stride, padding, count_include_pad: true }))
    }
}

/// `torch.nn.AvgPool2d`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AvgPool2d {
    /// Rows and columns of the window.
    pub kernel: (usize, usize),
    /// The stride: pixels from one window to the next.
    pub stride: (usize, usize),
    /// Zero padding on each side.
    pub padding: (usize, usize),
    /// Whether the mean counts the padding.
    pub count_include_pad: bool,
}

impl AvgPool2d {
    /// A square window, without padding.
    pub fn new(kernel: usize, stride: usize) -> AvgPool2d {
        let (kernel, stride) = ((kernel, kernel), (stride, stride));
        AvgPool2d { kernel, stride, padding: (0, 0), count_include_pad: true }
    }

    /// `[n, h, w, c]` → `[n, h', w', c]`.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        let &AvgPool2d { kernel, stride, padding, count_include_pad } = self;
        b.layer(name, |b| b.avg_pool(x, Window::Fixed { kernel, stride, padding, count_include_pad }))
    }
}

/// `torch.nn.AdaptiveAvgPool2d`: windows that cut the image into `out` rows and columns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdaptiveAvgPool2d {
    /// Rows and columns of the output.
    pub out: (usize, usize),
}

impl AdaptiveAvgPool2d {
    /// `[n, h, w, c]` → `[n, out.0, out.1, c]`.
    pub fn trace(&self, b: &mut Builder, name: &str, x: Tensor) -> Traced {
        b.layer(name, |b| b.avg_pool(x, Window::Adaptive { out: self.out }))
    }
}

//! How keys and kinds are written down: a doc comment with what the page says, a name, and how it is read and kept.

/// What the section of a type is, made when it is first asked for.
macro_rules! section {
    ($spec:ty => $section:expr) => {
        impl $crate::job::section::Keyed for $spec {
            fn section() -> &'static $crate::job::section::Section<$spec> {
                static SECTION: std::sync::LazyLock<$crate::job::section::Section<$spec>> =
                    std::sync::LazyLock::new(|| $section.done());
                &SECTION
            }
        }
    };
}

/// The keys of a table, as a `Vec` of them, after the type that they fill. Each is `name: type => field;`, where `field`
/// gives the place of the value in the job, and nothing for kinds that do not have it; or `name: type => get, set;`.
/// Then may follow what `Key` offers, such as `or "the default in words";` or `needed "what to write";`. A key that
/// differs between kinds is declared once for each way in which it is meant.
macro_rules! keys {
    ($spec:ty; $($(#[doc = $words:literal])+
       $name:ident: $of:expr => $field:expr $(, $set:expr)? $(; $option:ident $argument:expr)*;)*) => {
        vec![$(
            $crate::job::declare::keys!(@one $spec, $name, $of, $field $(, $set)?)
                .words(concat!($($words),+).trim_start())
                $(.$option($argument))*
        ),*]
    };
    (@one $spec:ty, $name:ident, $of:expr, $field:expr) => {
        $crate::job::key::Key::<$spec>::field(stringify!($name), $of, $field)
    };
    (@one $spec:ty, $name:ident, $of:expr, $get:expr, $set:expr) => {
        $crate::job::key::Key::<$spec>::property(stringify!($name), $of, $get, $set)
    };
}

/// The kinds of a table, as a `Vec` of them: `"name" | "another" => start;`, where `start` gives what a kind starts from,
/// by its name.
macro_rules! kinds {
    ($($(#[doc = $words:literal])+ $($name:literal)|+ => $start:expr;)*) => {{
        let rows =
            [$($crate::job::section::kinds(&[$($name),+], $start, concat!($($words),+).trim_start())),*];
        rows.into_iter().flatten().collect::<Vec<_>>()
    }};
}

/// The field of the variants that have it: `field!(Source::{Table | Text}.test in source)`.
macro_rules! field {
    ($enum:ident::{$($variant:ident)|+}.$field:ident $(in $place:ident)?) => {
        |s| match &mut (*s)$(.$place)? {
            $($enum::$variant { $field, .. })|+ => Some($field),
            _ => None,
        }
    };
}

pub(super) use {field, keys, kinds, section};
